# Device code inside the library. nvcc compiles src/cuda/kernels.cu to PTX once, ptxas makes machine code of that for each architecture, and
# all of it becomes arrays of bytes. Without nvcc, or without the source, the table is empty and the library says so.
#
#   cmake -D OUTPUT=file.c -D IMAGES=compute=file;compute=file... -P images.cmake    writes the table

set(images_script ${CMAKE_CURRENT_LIST_FILE})
# The least compute capability, of which the PTX is, and those that get machine code, newest first.
set(HALFSTEP_CUDA_PTX 80)
set(HALFSTEP_CUDA_ARCHITECTURES 120 100 90 89 86 80)

function(halfstep_device_images result)
  set(source ${PROJECT_SOURCE_DIR}/src/cuda/kernels.cu)
  set(output ${PROJECT_BINARY_DIR}/cuda_images.c)
  find_program(NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  find_program(PTXAS ptxas HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  mark_as_advanced(NVCC PTXAS)
  set(has_source FALSE)
  if(EXISTS ${source})
    set(has_source TRUE)
  endif()
  string(TOUPPER "${HALFSTEP_CUDA}" wanted)
  set(found FALSE)
  if(NVCC AND PTXAS AND has_source)
    set(found TRUE)
  endif()
  if(wanted STREQUAL AUTO AND NOT found)
    message(STATUS "HALFSTEP_CUDA: no device code, nvcc or src/cuda/kernels.cu not found")
  elseif(NOT found AND HALFSTEP_CUDA)
    message(FATAL_ERROR "HALFSTEP_CUDA=ON but nvcc, ptxas or src/cuda/kernels.cu not found")
  endif()
  set(images "")
  set(files "")
  if(found AND (wanted STREQUAL AUTO OR HALFSTEP_CUDA))
    set(ptx ${PROJECT_BINARY_DIR}/kernels.ptx)
    add_custom_command(OUTPUT ${ptx}
      COMMAND ${NVCC} -ptx -arch=compute_${HALFSTEP_CUDA_PTX} -std=c++17 --fmad=false -I${PROJECT_SOURCE_DIR}/src
              -I${PROJECT_SOURCE_DIR}/include -MD -MF ${ptx}.d -MT ${ptx} -o ${ptx} ${source}
      DEPENDS ${source} DEPFILE ${ptx}.d)
    foreach(architecture IN LISTS HALFSTEP_CUDA_ARCHITECTURES)
      set(cubin ${PROJECT_BINARY_DIR}/kernels.sm_${architecture}.cubin)
      add_custom_command(OUTPUT ${cubin} COMMAND ${PTXAS} -arch=sm_${architecture} --fmad=false -o ${cubin} ${ptx} DEPENDS ${ptx})
      list(APPEND images ${architecture}=${cubin})
      list(APPEND files ${cubin})
    endforeach()
    list(APPEND images 0=${ptx})
    list(APPEND files ${ptx})
  endif()
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -D OUTPUT=${output} -D "IMAGES=${images}" -P ${images_script}
    DEPENDS ${files} ${images_script} VERBATIM)
  set(${result} ${output} PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE)
  set(arrays "")
  set(rows "")
  foreach(image IN LISTS IMAGES)
    string(REGEX MATCH "^([0-9]+)=(.*)$" image "${image}")
    set(compute ${CMAKE_MATCH_1})
    file(READ "${CMAKE_MATCH_2}" bytes HEX)
    # PTX is a text, which ends with a 0.
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}00")
    string(APPEND arrays "static const _Alignas(64) unsigned char image_${compute}[] = {${bytes}};\n")
    string(APPEND rows "    {${compute}, image_${compute}, sizeof image_${compute}},\n")
  endforeach()
  file(WRITE "${OUTPUT}" "#include \"cuda/images.h\"\n${arrays}const struct hstep_cuda_image hstep_cuda_images[] = {\n${rows}    {0, 0, 0}};\n")
endif()
