"""Knowledge from a teacher: alignment of tokenizers, the teacher, the student's start, losses."""
