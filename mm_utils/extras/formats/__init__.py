"""Further formats of pairs: annotation files, folders of classes, caption files, addresses of images."""
