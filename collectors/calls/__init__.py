"""The debugger's framework-free part: calls, their selection, and the interface to a dump's writer."""
