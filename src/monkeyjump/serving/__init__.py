"""Adapters in use: answers to prompts and files, conversations, and a server."""
