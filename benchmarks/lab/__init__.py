"""A laboratory: several "hosts" on one machine, joined by links of a limited rate. See ../README.md."""
