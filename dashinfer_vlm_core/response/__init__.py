"""Tokens -> objects of OpenAI's API."""
