"""Callbacks with which a trainer's loop is watched in one line; see `trainsentry.integrations`."""
