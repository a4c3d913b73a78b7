"""What the tests share, by subject: models, objectives, media files, corpora, launches, servers."""
