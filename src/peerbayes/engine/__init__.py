"""How one step is run: eager, compiled or captured, on one device or several processes."""
