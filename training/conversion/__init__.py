"""Conversion of any ALBERT checkpoint, from the Hub or a folder, to one standard folder."""
