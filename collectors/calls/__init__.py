"""Calls of modules and operations as a debugger records them, whatever the framework."""
