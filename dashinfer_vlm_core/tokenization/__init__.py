"""Text <-> token ids: tokenizer, chat template, tools as text, characters of an answer, strings that end it."""
