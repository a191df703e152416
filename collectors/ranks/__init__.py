"""Rendezvous of a run's ranks over the monitor's own sockets: authentication, exchanges, max-reduce and a store."""
