"""Tokens to response objects of OpenAI's API."""
