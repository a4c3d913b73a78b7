"""What the evaluation scripts report: tables, curves, sizes of embeddings, figures in the model card."""
