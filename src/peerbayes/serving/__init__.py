"""The verb serve: a trained run behind a page and a JSON API, on this machine."""
