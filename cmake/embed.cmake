# cmake -D INPUT=file -D OUTPUT=file.c -D NAME=symbol -P embed.cmake: a text file as a C string, an empty one when INPUT is
# empty. The text never becomes a CMake list, in which brackets and semicolons would have a meaning.
set(text "")
if(INPUT)
  file(READ "${INPUT}" text)
endif()
string(REPLACE "\\" "\\\\" text "${text}")
string(REPLACE "\"" "\\\"" text "${text}")
string(REPLACE "\n" "\\n\"\n    \"" text "${text}")
file(WRITE "${OUTPUT}" "extern const char ${NAME}[];\nconst char ${NAME}[] =\n    \"${text}\";\n")
