"""What stands around a torch optimizer: wrappers that step it, and fp32 masters that it updates."""
