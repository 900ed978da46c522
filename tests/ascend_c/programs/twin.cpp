// All programs that test the twin itself, as one: most of what they make of its templates is common to them.
#include "discipline.cpp"
#include "misuse.cpp"
#include "movement.cpp"
#include "numerics.cpp"
