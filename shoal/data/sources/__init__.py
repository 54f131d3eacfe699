"""Where tokens come from: documents by index, one file for each format."""
