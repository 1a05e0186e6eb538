"""The privacy statement of a run, plots, and bounds on attacks."""
