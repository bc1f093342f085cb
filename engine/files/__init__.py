"""Files and folders, safely: what the system refuses becomes a sentence, and what is written is whole or absent."""
