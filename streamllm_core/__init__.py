"""The engine: tokens in, tokens out."""
