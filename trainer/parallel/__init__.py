"""Several ranks: their numbers, their groups and how they communicate."""
