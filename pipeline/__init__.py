"""The product: reads records, runs tasks over the engine, writes results."""
