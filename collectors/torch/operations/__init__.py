"""What a forward pass computes: its operations, and how they change."""
