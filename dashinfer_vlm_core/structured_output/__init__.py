"""Response format or tools to grammar to token masks; generated text to content and tool calls."""
