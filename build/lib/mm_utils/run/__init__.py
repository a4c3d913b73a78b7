"""Start and finish a run: output folder, checks, callbacks, model card, next commands."""
