"""Papers: the recipes and figures of each."""
