"""Safe files and folders: system errors become sentences, and files are whole or absent."""
