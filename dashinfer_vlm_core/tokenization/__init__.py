"""Text <-> token ids: tokenizer, chat template, tool formats, incremental detokenizer, stop strings."""
