"""Everything that adapts to BentoML."""
