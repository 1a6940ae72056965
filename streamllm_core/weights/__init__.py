"""Where layer bytes come from."""
