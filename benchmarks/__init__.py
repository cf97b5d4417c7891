"""Measurements beyond ``farandole bench``; not part of the package."""
