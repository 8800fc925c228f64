"""PEFT's own tests, run on this library's methods: `make peft-suite` (see run.py)."""
