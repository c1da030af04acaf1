"""Version of the ds_dynatrain package."""

__version__ = "0.1.0"
