"""What every room uses: settings, roles, policies, errors, names and timers."""
