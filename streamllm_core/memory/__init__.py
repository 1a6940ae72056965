"""Where bytes live while the model runs."""
