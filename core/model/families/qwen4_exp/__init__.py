"""Qwen4-Exp: how its configuration is read, and its layers."""
