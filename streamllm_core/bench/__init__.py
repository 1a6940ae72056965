"""How close the runtime comes to what links and units allow, on random weights of a given shape."""
