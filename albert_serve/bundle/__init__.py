"""What a bundle holds: its manifest, its weights, and which bundles there are."""
