"""Models: what a checkpoint says, where it lies, patches, and what an architecture gives to the engine."""
