"""What a run reports: the privacy statement, plots, and figures for an attacker."""
