"""Schedules made visible. Every view takes the schedule, or its execution by the verifier, and draws what is there."""
