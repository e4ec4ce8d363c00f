"""The command line: `dashinfer-vlm`, options from the configuration's fields, what people see."""
