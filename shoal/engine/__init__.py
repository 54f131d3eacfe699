"""Puts a model, an optimizer and a config together; forward, backward, step."""
