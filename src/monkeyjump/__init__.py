"""Routed parameter-efficient fine-tuning for Hugging Face models."""
