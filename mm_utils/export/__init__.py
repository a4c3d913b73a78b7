"""Export to ONNX: graphs, precisions, layouts of folders, and the comparison with torch."""
