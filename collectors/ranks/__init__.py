"""How the ranks of a run find and trust each other, over sockets of the monitor's own."""
