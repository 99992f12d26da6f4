"""Any ALBERT checkpoint, from the hub or a folder, as the Hugging Face directory that we read."""
