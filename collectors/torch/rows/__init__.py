"""How a torch tensor becomes a row of statistics, on the host and on a device."""
