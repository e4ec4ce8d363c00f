"""The command line `dashinfer-vlm`: entry point, options from EngineConfig, terminal output."""
