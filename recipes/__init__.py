"""Programs and stages that made the model in `models/`; not in the wheel."""
