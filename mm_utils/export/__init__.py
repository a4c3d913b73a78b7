"""Export to ONNX: graphs, layouts of folders, and the comparison with torch."""
