"""Safe files and folders: system errors become sentences, and what is written is whole or absent."""
