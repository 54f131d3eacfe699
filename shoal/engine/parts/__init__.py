"""What joins the steps of an engine, a file for each technique. ``part.py`` says when an engine calls a part."""
